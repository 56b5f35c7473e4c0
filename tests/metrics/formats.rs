//! The formats, judged by others.

use crate::filled::Filled;
use crate::tools::run;

#[tokio::test]
async fn promtool_finds_nothing_wrong_with_any_endpoint() {
    let filled = Filled::new().await;
    for (endpoint, text) in filled.as_text() {
        let said = run("promtool", &["check", "metrics"], &text);
        // Names of cAdvisor and of the kubelet, by which dashboards know them.
        let known = [
            "cadvisor_version_info label names should be",
            "kubelet_cpu_manager_exclusive_cpu_allocation_count non-histogram",
            "kubelet_pod_resize_duration_milliseconds use base unit",
            "kubelet_topology_manager_admission_duration_ms metric names should not contain abbreviated units",
        ];
        let complaints = said.unwrap_or_else(|said| said);
        let complaints: Vec<&str> = (complaints.lines())
            .filter(|line| !known.iter().any(|known| line.starts_with(known)))
            .collect();
        assert!(complaints.is_empty(), "{endpoint}: {complaints:#?}\n{text}");
    }
    // It would say so.
    let wrong = "# TYPE a_milliseconds counter\na_milliseconds 1\n";
    assert!(run("promtool", &["check", "metrics"], wrong).is_err());
}

#[tokio::test]
async fn every_endpoint_is_open_metrics() {
    let filled = Filled::new().await;
    for (endpoint, text) in filled.all() {
        let families = text.lines().filter(|l| l.starts_with("# TYPE ")).count();
        match run("openmetrics", &[], text) {
            Ok(said) => assert_eq!(said.trim(), families.to_string(), "{endpoint}"),
            Err(error) => panic!("{endpoint}: {error}\n{text}"),
        }
    }
    let unfinished = "# TYPE a gauge\na 1\n";
    assert!(
        run("openmetrics", &[], unfinished).is_err(),
        "without an end mark"
    );
}
