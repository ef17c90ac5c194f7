"""What a person or a program gets to see, and files that they fetch."""
