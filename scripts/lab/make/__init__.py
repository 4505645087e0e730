"""What the repository has that is made: reference pages, the dashboard, the picture of the page, the demo model."""
