"""The tests of the conformance kit. Their names are public."""
