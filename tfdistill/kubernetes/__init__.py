"""Manifests of Kubernetes: what a run is there, object by object."""
