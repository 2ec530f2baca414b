"""What is known of links: pings, bursts, estimates."""
