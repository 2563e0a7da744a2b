"""The main job on real text: train, export, reload, measure, generate, report."""
