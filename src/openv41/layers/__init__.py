"""One nn.Module file per report component. Report §2.1."""
