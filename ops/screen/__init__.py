"""Live terminal screens: pictures, which are plain data, and the one module that draws them."""
