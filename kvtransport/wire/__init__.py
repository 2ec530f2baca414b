"""What travels: tickets, encrypted channels, frames, and the bookkeeping of what has arrived."""
