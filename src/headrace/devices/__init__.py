"""Where bytes go, one adapter per file; `base` holds the verbs that all of them share."""
