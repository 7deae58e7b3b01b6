"""The test of inferred laws on the program itself, in float64 at random points, without any rule."""
