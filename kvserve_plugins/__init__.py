"""The components that come with kvserve: one folder a kind, one file a component."""
