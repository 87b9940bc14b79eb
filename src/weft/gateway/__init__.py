"""The process before several workers: it keeps each conversation on the worker that holds its cache."""
