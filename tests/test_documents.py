"""What is read under paths, and the reason for each file that is not."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from pypdf import PdfReader, PdfWriter

from engine_adapter.documents import Documents, read_documents
from repo_service.domain.errors import InvalidInput, PathNotFound


def pdf(*lines: str) -> bytes:
    """A PDF of one page with lines of text; without any, as a scan is."""
    drawn = " T* ".join(f"({line}) Tj" for line in lines)
    content = f"BT /F1 12 Tf 14 TL 72 720 Td {drawn} ET".encode() if lines else b""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data = b"%PDF-1.4\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return data + b"xref\n0 6\n0000000000 65535 f \n%strailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (
        table,
        len(data),
    )


def locked_pdf() -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("secret"))))
    writer.encrypt("password", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def texts(found: Documents) -> dict[str, str]:
    return {document.name: document.text for document in found.documents}


def reasons(found: Documents) -> dict[str, str]:
    return {os.path.basename(item.source): item.reason for item in found.skipped}


def tree(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def test_text_markdown_code_and_pdfs_are_read_in_order(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "docs",
        {
            "b.md": "# Mill\n",
            "a.txt": "one\r\ntwo\r",
            "code/main.rs": "fn main() {}\n",
            "z.pdf": pdf("The valve opens", "at 42 bar"),
        },
    )
    found = read_documents([root])
    assert texts(found) == {
        "docs/a.txt": "one\ntwo\n",
        "docs/b.md": "# Mill\n",
        "docs/code/main.rs": "fn main() {}\n",
        "docs/z.pdf": "The valve opens\nat 42 bar",
    }
    assert [document.source for document in found.documents] == sorted(d.source for d in found.documents)
    assert (found.skipped, found.hidden, found.roots) == ([], 0, [str(root)])


def test_noise_is_left_out_as_ripgrep_does(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "code",
        {
            ".git/config": "x",
            ".gitignore": "build/\n*.log\n!kept.log\n",
            "build/out.txt": "x",
            "run.log": "x",
            "kept.log": "kept",
            "part/.gitignore": "local.txt\n!special.log\n",
            "part/local.txt": "x",
            "part/special.log": "special",
            "local.txt": "read",
        },
    )
    (root / "link").symlink_to(root / "local.txt")
    found = read_documents([root])
    assert set(texts(found)) == {"code/kept.log", "code/local.txt", "code/part/special.log"}
    assert found.hidden == 6
    assert set(texts(read_documents([root / ".git" / "config", root / "run.log"]))) == {"config", "run.log"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfcaf\xc3\xa9", "café"),
        ("café".encode("utf-16"), "café"),
        ("Grüße".encode("utf-32"), "Grüße"),
        ("La cathédrale a été bâtie au siècle dernier, près de la forêt.".encode("latin-1"), None),
        ("Мельница стоит на берегу реки, и колесо её вертится день и ночь.".encode("cp1251"), None),
    ],
)
def test_old_encodings_are_read(tmp_path: Path, content: bytes, text: str | None) -> None:
    (tmp_path / "file").write_bytes(content)
    (found,) = texts(read_documents([tmp_path / "file"])).values()
    assert found == (text or content.decode("latin-1" if b"cath" in content else "cp1251"))


def test_each_file_that_is_no_document_has_a_reason(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "good.txt": "good",
            "image.png": b"\x89PNG\r\n\x1a\n\0\0",
            "large.txt": "x" * 2001,
            "empty.txt": " \n",
            "scan.pdf": pdf(),
            "locked.pdf": locked_pdf(),
            "broken.pdf": pdf("text")[:150],
            "cut.txt": b"\xff\xfea",
        },
    )
    found = read_documents([root], max_file_bytes=2000)
    assert [d.text for d in found.documents] == ["good"]
    said = reasons(found)
    assert said.pop("broken.pdf").startswith("it is a damaged PDF: ")
    assert said == {
        "cut.txt": "it begins as utf-16 and goes on otherwise: truncated data",
        "empty.txt": "it is empty",
        "image.png": "it is binary",
        "large.txt": "it has more than 2,000 bytes, which is the limit",
        "locked.pdf": "it is a PDF that needs a password",
        "scan.pdf": "it is a PDF without text, such as a scan: run text recognition on it first",
    }


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound) as error:
        read_documents([tmp_path / "nowhere"])
    assert str(tmp_path / "nowhere") in error.value.message
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(InvalidInput, match="neither a file nor a folder"):
        read_documents([fifo])


def test_paths_without_anything_readable_are_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there are no files"):
        read_documents([tmp_path])
    (tmp_path / "scan.pdf").write_bytes(pdf())
    with pytest.raises(InvalidInput, match="a PDF without text") as error:
        read_documents([tmp_path])
    assert error.value.details["skipped"][0][0] == str(tmp_path / "scan.pdf")


def test_a_file_found_by_two_paths_is_read_once(tmp_path: Path) -> None:
    root = tree(tmp_path / "docs", {"a.txt": "a"})
    assert len(read_documents([root, root / "a.txt"]).documents) == 1
