"""Questions that are answered on another machine."""
