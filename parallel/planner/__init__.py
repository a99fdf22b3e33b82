"""What thinks about training steps: machines, costs, schedules. Imports what runs, never back."""
