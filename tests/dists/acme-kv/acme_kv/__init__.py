"""A storage vendor's package, installed by the tests of kvpad's hooks."""
