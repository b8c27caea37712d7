"""Feature rows: where they are kept, and how a rank gets rows that other ranks own."""
