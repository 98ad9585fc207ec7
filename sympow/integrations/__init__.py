"""What connects sympow to other libraries. Each part is imported by its own name and needs an extra of that name."""
