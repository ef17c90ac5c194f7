"""What a terminal shows while something goes on: pictures, which are plain data, and the one module that draws them."""
