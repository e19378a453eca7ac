"""What runs as Lambda functions: each file is inlined into a template as it stands, so it imports nothing of ours."""
