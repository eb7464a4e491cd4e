"""The commands of `tfdistill`: a file each, and what they share."""
