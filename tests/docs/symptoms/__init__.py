"""What goes wrong, brought about: one function for each text that the page *Troubleshooting* quotes."""
