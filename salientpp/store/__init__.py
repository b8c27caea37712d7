"""Where rows live, and how a rank gets a row that it lacks."""
