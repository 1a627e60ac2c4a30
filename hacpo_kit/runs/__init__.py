"""One run on disk: folder, checkpoints, recorded experience, changes of settings, evaluation."""
