"""Provokes the problems of the *Troubleshooting* page: one function for each text that the page quotes."""
