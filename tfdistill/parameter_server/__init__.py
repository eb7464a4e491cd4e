"""The same fit for a model whose variables live on servers."""
