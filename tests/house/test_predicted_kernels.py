from benchmarks import predicted_kernels


def test_the_page_is_what_the_records_say():
    assert predicted_kernels.PAGE.read_text(encoding="utf-8") == predicted_kernels.page()
