"""Makes a graph from tables with keys: a table a vertex type, and tables of edges that name their ends by keys."""
