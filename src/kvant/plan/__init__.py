"""Options, settings, limits and the plan: all choices about an engine, made before anything is loaded."""
