"""The incremental parser. The module parser.py contains its public interface."""
