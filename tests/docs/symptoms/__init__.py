"""What goes wrong, brought about: one function for each text that *When something goes wrong* quotes."""
