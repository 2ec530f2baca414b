"""`--explain`: what a plan's words mean, and why it is as it is."""
