"""What is a graph here, and how does one get in?"""
