"""Full-screen terminal views: modules that build pictures as plain data, and `render`, which alone draws them."""
