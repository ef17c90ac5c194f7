"""Full-screen terminal views: modules that build frames as plain data, and `render`, which alone draws them."""
