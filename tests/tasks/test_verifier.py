"""The rules of the verifier: which answers are equal, and which golds it can compare with."""

import pytest

from hacpo_kit.tasks.verifier import compare, usable

EQUAL = r"""
1 1/4 | 5/4;  -1 1/4 | -5/4;  12\frac12 | 12.5;  0.\overline{3} | 1/3;  27.0 | 27;  1{,}234 | 1234
10\,080 | 10,\!080;  28\% | 0.28;  28\% | 28;  62.5 | 62.5%;  4.5\times10^{33} | 4.5e33;  0.00001 | 1e-5
1.4142136 | \sqrt2;  0.333333 | 1/3;  pi/2 | \dfrac{\pi}{2};  2 pi r | 2\pi r;  arctan(2) | \tan^{-1} 2;  \log_2 8 | 3
90 | 90^\circ;  \$18 | 18;  ３ | 3;  −3 | -3;  72\text{ eggs} | 72;  18 dollars | 18;  5 \text{ cm}^2 | 5
5\text{ million} | 5,000,000;  \frac{1}{3}. | \frac13;  x=5 | 5;  5 | x=5;  f(x)=x+1 | x+1;  2x+2y=4 | x+y=2
xy=1 | y=1/x;  x=2y | y=x/2;  x+y=5 | 5;  1,2 | 2,1;  \{3,1\} | 1,3;  x=1 or x=2 | 2,1;  y=2,x=1 | x=1,y=2
19, 46 and 82 | 82, 19, 46;  (1,2),(3,4) | (3,4),(1,2);  -3, 3 | \pm 3;  1+\sqrt{19},1-\sqrt{19} | 1 \pm \sqrt{19}
1,2,...,n | 1, 2, \dots, n;  x>2 | 2<x;  2<x | (2,\infty);  x \in [1,2] | [1,2];  (1,2)\cup(3,4) | (3,4)\cup(1,2)
\frac{1}{\sqrt{n}} | \sqrt{1/n};  (x+1)^2 | x^2+2x+1;  \sqrt{x^2} | |x|;  \frac{1-i}{4} | \frac{1}{2+2i}
m_{\max}=2 | m_{\max}=4/2;  \begin{pmatrix} 1/2 \\ 2 \end{pmatrix} | \begin{pmatrix} 0.5 \\ 2 \end{pmatrix}
52 | 52_8;  52_{8} | 52_8;  C | \text{(C)};  (C) | \text{(C)};  \text{Even} | even;  np.arcsin(10/13) | \arcsin(10/13)
\sqrt{2}\sqrt{3}-\sqrt{6} | 0;  x = 1,234 | 1234;  k=4 | k=4.0;  y = 9,829 \text{ cm} | 9829;  N=0.5 | \frac{1}{2}
"""
UNEQUAL = r"""
1 1/4 | 11/4;  4 10/3 | 10;  4 10/3 | 14/3;  28 | 0.28;  0.33 | 1/3;  1.414 | \sqrt2;  123456.5 | 123456
4.6e33 | 4.5e33;  2.7e-7 | 2.8e-7;  \frac{1}{2006!} | \frac{1}{2004!};  2^{100} | 2^{100}+1;  5\text{ million} | 5
2.5\% | 2;  2021 | \pm 2021;  (1,2) | (2,1);  \{1,3\} | (1,3);  {1,3} | (3,1);  [3,4] | (3,4);  [3,4) | (3,4]
1,2 | 1,2,3;  7=5 | 5;  x=7=5 | 5;  5 6 | 11;  5, 7 | 5;  5 \text{ or } 7 | 5;  \infty | 9.6;  n=1,2,3 | n=2,3,4
x=1,y=2 | 2,1;  y=5 | x=5;  x+y=3 | x+y=2;  x^2+2=0 | x^2+1=0;  x'+x-1=0 | 0;  2 | k \ge 2;  x>2 | x>3
5 | 5, 7;  x \in [1,2] | y=3;  x \in [1,2] | x=2
1, 2, 3, ... | 1, 2, 3;  1, 3, \ldots, 2n-1 | 1, 2, \ldots, n;  \frac{n(n+1)}{2} | 1+2+\ldots+n;  52_8 | 52_9
52_8 | 52;  |x| | x;  \ln(x^2) | 2\ln x;  \frac{1+i}{4} | \frac{1}{2+2i};  6 | 6m;  2\cos 3 | 2\cos 3t
\pi(r^2-R^2) | \pi(R^2-r^2);  0 | \pi(R^2-r^2);  c | C;  D | \text{(C)};  evil | live;  no | yes;  2n | even
4 | \foo{3} 4;  \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix};  1/0 | 5
10^{10^{10}} | 3;  x = = 4 | 4;  x = 1,235 | 1234;  e=3 | 3;  y=4 | x=4;  x=3=4 | 4
"""


def cases(table):
    return [tuple(case.split(" | ")) for line in table.strip().splitlines() for case in line.split(";  ")]


@pytest.mark.parametrize(("answer", "gold"), cases(EQUAL))
def test_compare_equal(answer, gold):
    assert compare(answer, gold) == (1.0, "correct")


@pytest.mark.parametrize(("answer", "gold"), [c for c in cases(UNEQUAL) if usable(c[1])])
def test_compare_unequal(answer, gold):
    assert compare(answer, gold) == (0.0, "wrong")


@pytest.mark.parametrize(
    ("answer", "gold", "reward"),
    [
        ("9.80", "9.81 (tolerance 0.02)", 1.0),
        ("9.78", "9.81 (tolerance 0.02)", 0.0),
        (r"g = 9.82 \text{ m/s}^2", "9.81 (tolerance 0.02)", 1.0),
        (r"\pi", "3.1 (tolerance 1e-1)", 1.0),
        ("60.05, 90", "$90$,$60$ (tolerance 1e-1)", 1.0),
        ("60.05", "$90$,$60$ (tolerance 1e-1)", 0.0),
        ("x", "3.1 (tolerance 1e-1)", 0.0),
        ("3", r"\text{even} (tolerance 1)", None),
        ("3", "1/0 (tolerance 1)", None),
    ],
)
def test_compare_with_a_tolerance(answer, gold, reward):
    assert compare(answer, gold)[0] == reward
