"""Small pieces that every other folder uses."""
