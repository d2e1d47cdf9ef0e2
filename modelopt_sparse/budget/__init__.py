"""Where zeros go: the choice for each layer that loses least within a budget."""
