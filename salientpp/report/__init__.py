"""Pages that explain a run, an analysis or a plan: one HTML file each, which works offline."""
