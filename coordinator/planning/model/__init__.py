"""What is planned: clusters, workloads, deadlines, and what links and lengths cost."""
