"""What a plan would cost, before machines are rented."""
