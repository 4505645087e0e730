"""What a GPU can show, measured by one command: campaign.py."""
