"""Where programs import Run:ai's `s3_utils` from."""
