"""SpecEE: four candidate tokens proposed before the pass make exits cheap to judge."""
