"""Models, their versions, and the server that answers for them. What is said about them is in the bucket below models/."""
