"""Tables and plots of the documentation, one module per page of docs/results."""
