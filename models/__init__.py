"""Workloads: builders and input pipelines, free of any launching."""
