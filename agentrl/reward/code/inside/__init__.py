"""Source that runs inside sandboxes. It imports the standard library only, and is sent there as text."""
