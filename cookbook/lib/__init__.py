"""What the recipes share: settings and output of a run, data, group advantages, evaluation, a plot."""
