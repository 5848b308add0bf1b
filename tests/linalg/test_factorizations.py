"""Factorizations with jitter, and determinants and quadratic forms of ``I - G (x) F``."""

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_structvi.linalg.factorizations import (
    add_to_diagonal,
    log_det,
    stable_cholesky,
    stable_root,
)
from pyro_structvi.linalg.matrices import kronecker_log_det, kronecker_quadratic
from pyro_structvi.structures.inducing.outputs import OrthonormalRows
from tests.unit_noise import close

ROWS, COLUMNS = 3, 4
operations = torch.ops.pyro_structvi


def positive_definite(*batch, size):
    root = torch.randn(*batch, size, size)
    return root @ root.mT + torch.eye(size)


def with_smallest_eigenvalue(value, size=4):
    """Return a symmetric matrix whose eigenvalues are ``value, 1, ..., 1``, up to rounding."""
    basis = torch.linalg.qr(torch.randn(size, size)).Q
    matrix = torch.eye(size) + (value - 1) * torch.outer(basis[0], basis[0])
    return (matrix + matrix.mT) / 2


# ---- Cholesky factors ----------------------------------------------------------------------------


NEEDED = [(-3e-12, 1e-10), (-3e-10, 1e-8), (-3e-8, 1e-6), (-3e-6, 1e-4)]


def test_each_matrix_takes_the_smallest_jitter_that_works():
    eigenvalues = [1.0, *(eigenvalue for eigenvalue, _ in NEEDED), -1.0]
    expected = torch.tensor([0.0, *(jitter for _, jitter in NEEDED), 0.0])
    matrices = 7 * torch.stack([with_smallest_eigenvalue(value) for value in eigenvalues])
    tril, jitter = stable_cholesky(matrices)
    assert tril[:-1].triu(1).eq(0).all()
    close(jitter, expected * matrices.diagonal(dim1=-2, dim2=-1).mean(-1))
    assert tril[-1].isnan().all()
    close((tril @ tril.mT)[:-1], add_to_diagonal(matrices, jitter)[:-1])
    assert stable_cholesky(torch.full((2, 2), torch.nan))[0].isnan().all()
    # A look at numbers would wait for another device; on `meta` there are none.
    tril, jitter = stable_cholesky(torch.eye(3, device="meta").expand(2, 3, 3))
    assert (tril.shape, jitter.shape) == ((2, 3, 3), (2,))


def test_the_root_of_a_zero_covariance_is_zero():
    covariance = torch.stack([torch.zeros(3, 3), positive_definite(size=3)]).requires_grad_()
    root = stable_root(covariance)
    close(root @ root.mT, covariance)
    root.sum().backward()
    assert not covariance.grad[0].any()
    assert covariance.grad[1].any()


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("eigenvalue", [1.0, -3e-10])
def test_gradients_are_those_of_the_factor(eigenvalue, is_recorded):
    """The jitter counts as a constant."""
    matrix = with_smallest_eigenvalue(eigenvalue).requires_grad_()
    weight = torch.randn(4, 4)

    def factor(matrix):
        tril, jitter = stable_cholesky(matrix)
        return *torch.autograd.grad((tril * weight).sum(), matrix), tril, jitter

    run = make_fx(factor)(matrix) if is_recorded else factor
    found, tril, jitter = run(matrix)
    plain = torch.linalg.cholesky(add_to_diagonal(matrix, jitter.detach()))
    (expected,) = torch.autograd.grad((plain * weight).sum(), matrix)
    close(found, expected)
    close(tril, plain)


def test_a_record_chooses_the_jitter_at_each_run():
    """Without gradients by one operation, which factors once where nothing needs jitter."""
    recorded = make_fx(stable_cholesky)(positive_definite(3, size=4))
    names = [str(node.target) for node in recorded.graph.nodes if node.op == "call_function"]
    assert names.count("pyro_structvi.stable_cholesky.default") == 1
    assert not any("linalg" in name for name in names)
    matrices = torch.stack([with_smallest_eigenvalue(value) for value in (1.0, -3e-10, -1.0)])
    for found, expected in zip(recorded(matrices), stable_cholesky(matrices), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("eigenvalue", "batch"), [(1.0, ()), (-3e-10, (2,)), (-1.0, (2, 3))])
def test_the_operation_of_a_record_is_what_compilers_are_told(eigenvalue, batch):
    """Its layout too: a compiled step would read the factor of another layout as its transpose."""
    matrix = with_smallest_eigenvalue(eigenvalue).expand(*batch, 4, 4).contiguous()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operations.stable_cholesky.default, (matrix,), test_utils=tests)


# ---- Log determinants ----------------------------------------------------------------------------


def test_log_determinants_and_their_derivatives():
    matrix = positive_definite(2, size=3).requires_grad_()
    close(log_det(matrix), torch.logdet(matrix))
    assert torch.autograd.gradcheck(lambda m: log_det(symmetric(m)), matrix)
    assert torch.autograd.gradgradcheck(lambda m: log_det(symmetric(m)), matrix)
    close(torch.func.vmap(log_det)(matrix), torch.logdet(matrix))
    close(torch.func.grad(log_det)(matrix[0]), torch.linalg.inv(matrix[0]))
    matrices = torch.stack([torch.eye(2), -torch.eye(2)]).requires_grad_()  # one has none
    found = log_det(matrices)
    assert found.isnan().tolist() == [False, True]
    (gradient,) = torch.autograd.grad(found.sum(), matrices)
    assert gradient.isnan().flatten(1).all(-1).tolist() == [False, True]


# ---- Kronecker products --------------------------------------------------------------------------


def symmetric(matrix):
    return (matrix + matrix.mT) / 2


def complements(*batch):
    """Return ``I - G`` and ``I - F`` with eigenvalues between 0 and 1."""
    for size in (ROWS, COLUMNS):
        basis = torch.linalg.qr(torch.randn(*batch, size, size)).Q
        yield symmetric(basis @ torch.diag_embed(torch.rand(*batch, size)) @ basis.mT)


def dense_matrix(rows, columns):
    """Return ``I - G (x) F``."""
    G, F = torch.eye(ROWS) - rows, torch.eye(COLUMNS) - columns
    product = (G[..., :, None, :, None] * F[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
    return torch.eye(ROWS * COLUMNS) - product


@pytest.mark.parametrize("batch", [(), (2, 3), None], ids=str)
def test_determinant_and_quadratic_form_are_the_dense_ones(batch):
    """Also where all eigenvalues are equal, and the derivative of an eigenvector does not exist."""
    equal = 0.3 * torch.eye(ROWS), 0.2 * torch.eye(COLUMNS)
    leaves = [each.requires_grad_() for each in (equal if batch is None else complements(*batch))]
    k = torch.randn(5, *(batch or ()), ROWS, COLUMNS, requires_grad=True)
    matrix, flat = dense_matrix(*map(symmetric, leaves)), k.flatten(-2).unsqueeze(-1)
    form = (flat.mT @ torch.linalg.solve(matrix, flat))[..., 0, 0]
    for found, expected, inputs in (
        (log_det_of_kronecker(*leaves), torch.linalg.slogdet(matrix).logabsdet, leaves),
        (quadratic(k, *leaves), form, [k, *leaves]),
    ):
        close(found, expected)
        probe = torch.randn(expected.shape)
        own = torch.autograd.grad(found, inputs, probe, retain_graph=True)
        exact = torch.autograd.grad(expected, inputs, probe, retain_graph=True)
        for gradient, other in zip(own, exact, strict=True):
            close(gradient, other)
        with pytest.raises(RuntimeError, match=r"first derivatives only.*`create_graph=True`"):
            torch.autograd.grad(found.sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="not in forward mode"):
        torch.func.jacfwd(partial(quadratic, k))(*(leaf.detach() for leaf in leaves))


@pytest.mark.parametrize("tiny", [1e-8, 1e-14, 1e-200])
def test_they_keep_their_digits_where_both_factors_are_nearly_the_identity(tiny):
    """``1 - g f`` with ``g = f = 1 - tiny`` is ``2 tiny``, to first order."""
    rows, columns = tiny * torch.eye(ROWS), tiny * torch.eye(COLUMNS)
    found = kronecker_log_det(rows, columns)
    torch.testing.assert_close(found, ROWS * COLUMNS * torch.tensor(2 * tiny).log())
    k = torch.randn(ROWS, COLUMNS)
    quadratic = kronecker_quadratic(k, rows, columns)
    torch.testing.assert_close(quadratic * tiny, k.square().sum() / 2)


def log_det_of_kronecker(rows, columns):
    return kronecker_log_det(symmetric(rows), symmetric(columns))


def quadratic(k, rows, columns):
    return kronecker_quadratic(k, symmetric(rows), symmetric(columns))


# ---- orthonormal rows ----------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch"), [(2, ()), (3, (2,)), (6, (2,))])
def test_orthonormal_rows_are_those_of_the_factored_matrix_with_their_gradients(batch, size):
    factor = torch.randn(*batch, 3, size, requires_grad=True)
    diagonal = (torch.rand(*batch, 3) + 0.2).requires_grad_()
    basis, remainder, jitter = OrthonormalRows.apply(factor, diagonal)
    tril = torch.linalg.cholesky(factor @ factor.mT + torch.diag_embed(diagonal.square()))
    close(tril @ basis, factor)
    close(tril @ remainder, torch.diag_embed(diagonal))
    close(basis @ basis.mT + remainder @ remainder.mT, torch.eye(3).expand(*batch, 3, 3))
    assert jitter.eq(0).all()

    def rows(factor, diagonal):
        return OrthonormalRows.apply(factor, diagonal)[:2]

    constant = (factor.detach(), diagonal), (factor, diagonal.detach())
    for arguments in ((factor, diagonal), *constant):
        assert torch.autograd.gradcheck(rows, arguments)
    assert torch.autograd.gradgradcheck(rows, (factor, diagonal))


def rows_by_qr(factor, diagonal):
    """Return ``L^-1 [Z, D]`` as the Q of a QR decomposition, with a positive diagonal of R."""
    q, r = torch.linalg.qr(torch.cat([factor, torch.diag_embed(diagonal)], -1).mT)
    return (q * r.diagonal().sign()).mT


def test_jitter_counts_to_the_diagonal_and_is_constant():
    factor, probe = torch.randn(3, 6), torch.randn(3, 9)
    factor[1] = factor[0]
    arguments = factor.requires_grad_(), torch.full((3,), 1e-7, requires_grad=True)
    basis, remainder, jitter = OrthonormalRows.apply(*arguments)
    assert jitter > 0
    expected = rows_by_qr(factor, (arguments[1].square() + jitter.detach()).sqrt())
    rows = torch.cat([basis, remainder], -1)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-3)
    oracle = torch.autograd.grad((expected * probe).sum(), arguments)
    for found, gradient in zip(
        torch.autograd.grad((rows * probe).sum(), arguments), oracle, strict=True
    ):
        largest = gradient.abs().max().item()
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-3 * largest)


@pytest.mark.parametrize(("apart", "diagonal"), [(1.0, 1e-5), (1e-4, 1e-1), (1e-4, 1e-5)])
def test_rows_are_orthonormal_in_single_precision(apart, diagonal):
    """Two rows of Z are nearly one; a product in single precision would not tell them apart."""
    factor = torch.randn(8, 50)
    factor[1] = factor[0] + apart * torch.randn(50)
    basis, remainder, _ = OrthonormalRows.apply(factor.float(), torch.full((8,), diagonal).float())
    rows = torch.cat([basis, remainder], -1).double()
    torch.testing.assert_close(rows @ rows.mT, torch.eye(8), rtol=0, atol=1e-5)
