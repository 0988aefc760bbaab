"""Long measurements that answer one question each: resumable commands whose small results are kept in ``results/``."""
