"""The optimum of a guide."""

import torch


def minimize(guide, loss, max_iter=5000, tolerance_grad=1e-10, tolerance_change=1e-18):
    optimizer = torch.optim.LBFGS(
        guide.parameters(),
        line_search_fn="strong_wolfe",
        history_size=50,
        max_iter=max_iter,
        tolerance_grad=tolerance_grad,
        tolerance_change=tolerance_change,
    )

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
