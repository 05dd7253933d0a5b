"""What each technique saves and costs: `python -m validation.techniques`."""
