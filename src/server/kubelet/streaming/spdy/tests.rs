//! The codec by vectors of its own, round trips and garbage.

use bytes::BytesMut;
use proptest::prelude::*;

use super::header::{Deflater, Inflater, dictionary_id};
use super::*;

fn decode_all(bytes: &[u8]) -> Result<Vec<Frame>, SpdyError> {
    let mut decoder = Decoder::default();
    let mut input = BytesMut::from(bytes);
    let mut frames = Vec::new();
    while let Some(frame) = decoder.decode(&mut input)? {
        frames.push(frame);
    }
    Ok(frames)
}

#[test]
fn the_dictionary_is_the_protocols() {
    assert_eq!(dictionary_id(), 0xe3c6_a7c2);
}

#[test]
fn a_header_block_of_another_implementation_is_read() {
    // Python: c = zlib.compressobj(9, zdict=DICTIONARY); c.compress(block) + c.flush(zlib.Z_SYNC_FLUSH), twice.
    let first = hex(VECTOR_1);
    let second = hex(VECTOR_2);
    let mut inflater = Inflater::new();
    assert_eq!(
        inflater.block(&first).unwrap(),
        headers(&[("streamtype", "error"), ("requestid", "0")])
    );
    assert_eq!(
        inflater.block(&second).unwrap(),
        headers(&[("streamtype", "data"), ("port", "80"), ("requestid", "0")])
    );
}

const VECTOR_1: &str =
    "78f9e3c6a7c202e50e703a2b294a4dcc851625aca9a0800632388b20d196094ace8c0600000000ffff";
const VECTOR_2: &str = "02a5500cc5a072271152841781923b938501a64e00000000ffff";

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn headers(pairs: &[(&str, &str)]) -> Headers {
    pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

#[test]
fn frames_without_headers_are_the_bytes_the_protocol_says() {
    let mut out = BytesMut::new();
    Encoder::ping(7, &mut out);
    assert_eq!(&out[..], [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 7]);
    out.clear();
    Encoder::reset(5, 5, &mut out);
    assert_eq!(
        &out[..],
        [0x80, 3, 0, 3, 0, 0, 0, 8, 0, 0, 0, 5, 0, 0, 0, 5]
    );
    out.clear();
    Encoder::go_away(9, 0, &mut out);
    assert_eq!(
        &out[..],
        [0x80, 3, 0, 7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0, 0]
    );
    assert_eq!(
        Encoder::data_head(3, 0x01_02_03, true),
        [0, 0, 0, 3, 1, 1, 2, 3]
    );
}

#[test]
fn a_stream_is_opened_as_the_protocol_says() {
    let mut encoder = Encoder::new().unwrap();
    let mut out = BytesMut::new();
    let pairs = headers(&[("streamtype", "stdin")]);
    encoder.syn_stream(1, &pairs, true, &mut out).unwrap();
    assert_eq!(&out[..5], [0x80, 3, 0, 1, 1]);
    assert_eq!(&out[8..18], [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    // zlib with a preset dictionary, named by its checksum.
    assert_eq!(out[19] & 0x20, 0x20);
    assert_eq!(&out[20..24], [0xe3, 0xc6, 0xa7, 0xc2]);
    let expected = Frame::SynStream {
        stream: 1,
        fin: true,
        headers: pairs,
    };
    assert_eq!(decode_all(&out).unwrap(), [expected]);
}

#[test]
fn data_comes_out_before_its_frame_is_complete() {
    let mut decoder = Decoder::default();
    let mut input = BytesMut::from(&Encoder::data_head(1, 6, true)[..]);
    assert_eq!(decoder.decode(&mut input).unwrap(), None);
    assert!(!decoder.between_frames());
    input.extend_from_slice(b"abcd");
    let piece = |payload: &'static [u8], fin| {
        Some(Frame::Data {
            stream: 1,
            payload: payload.into(),
            fin,
        })
    };
    assert_eq!(decoder.decode(&mut input).unwrap(), piece(b"abcd", false));
    assert_eq!(decoder.decode(&mut input).unwrap(), None);
    input.extend_from_slice(b"efgh");
    assert_eq!(decoder.decode(&mut input).unwrap(), piece(b"ef", true));
    assert!(decoder.between_frames());
}

#[test]
fn an_endless_control_frame_is_refused_by_its_head() {
    let head = [0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff];
    assert!(matches!(
        decode_all(&head),
        Err(SpdyError::Length { kind: 1, .. })
    ));
    let short = [0x80, 3, 0, 6, 0, 0, 0, 2, 0, 0];
    assert!(matches!(
        decode_all(&short),
        Err(SpdyError::Length { kind: 6, length: 2 })
    ));
    assert!(matches!(
        decode_all(&[0x80, 2, 0, 6, 0, 0, 0, 0]),
        Err(SpdyError::Version(2))
    ));
}

#[test]
fn headers_that_expand_without_end_are_refused() {
    let mut zlib = flate2::Compress::new(flate2::Compression::best(), true);
    let plain = vec![0; 8 << 20];
    let mut packed = Vec::with_capacity(64 * 1024);
    zlib.compress_vec(&plain, &mut packed, flate2::FlushCompress::Sync)
        .unwrap();
    assert!(packed.len() < MAX_CONTROL);
    assert!(matches!(
        Inflater::new().block(&packed),
        Err(SpdyError::Headers("they are too long"))
    ));
}

#[test]
fn headers_that_are_too_long_are_not_sent() {
    let mut out = BytesMut::new();
    let long = "x".repeat(MAX_CONTROL);
    let sent = Deflater::new()
        .unwrap()
        .block(&[("a", long.as_str())], &mut out);
    assert!(sent.is_err() && out.is_empty());
}

#[tokio::test]
async fn a_connection_that_ends_within_a_frame_is_told_from_one_that_ends() {
    let frame = |length| {
        let mut bytes = Encoder::data_head(1, length, false).to_vec();
        bytes.extend(b"ab");
        bytes
    };
    let whole = frame(2);
    let mut reader = Reader::new(&whole[..]);
    assert!(reader.next().await.unwrap().is_some());
    assert_eq!(reader.next().await.unwrap(), None);
    let cut = frame(3);
    let mut reader = Reader::new(&cut[..]);
    assert!(reader.next().await.unwrap().is_some());
    assert!(matches!(reader.next().await, Err(SpdyError::Truncated)));
}

#[test]
fn after_the_last_headers_there_is_data_and_no_other_stream() {
    let mut encoder = Encoder::new().unwrap();
    let mut out = BytesMut::new();
    let headers = [("streamtype", "data")];
    encoder.syn_stream(1, &headers, false, &mut out).unwrap();
    encoder.end_headers();
    let refused = encoder.syn_stream(3, &headers, false, &mut out);
    assert!(matches!(refused, Err(SpdyError::Headers(_))), "{refused:?}");
    let refused = encoder.syn_reply(2, &headers, false, &mut out);
    assert!(matches!(refused, Err(SpdyError::Headers(_))), "{refused:?}");
    out.extend_from_slice(&Encoder::data_head(1, 1, true));
    out.extend_from_slice(b"x");
    let mut decoder = Decoder::default();
    let first = decoder.decode(&mut out).unwrap();
    assert!(
        matches!(first, Some(Frame::SynStream { stream: 1, .. })),
        "{first:?}"
    );
    let second = decoder.decode(&mut out).unwrap();
    assert!(
        matches!(
            second,
            Some(Frame::Data {
                stream: 1,
                fin: true,
                ..
            })
        ),
        "{second:?}"
    );
    assert!(out.is_empty());
}

fn pairs() -> impl Strategy<Value = Headers> {
    prop::collection::vec(("[a-z-]{0,20}", "\\PC{0,40}"), 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn blocks_of_one_connection_come_out_as_they_went_in(blocks in prop::collection::vec(pairs(), 1..12)) {
        let mut encoder = Encoder::new().unwrap();
        let mut decoder = Decoder::default();
        for (number, block) in blocks.into_iter().enumerate() {
            let stream = u32::try_from(number).unwrap();
            let mut out = BytesMut::new();
            encoder.syn_reply(stream, &block, false, &mut out).unwrap();
            let frame = decoder.decode(&mut out).unwrap();
            prop_assert_eq!(frame, Some(Frame::SynReply { stream, fin: false, headers: block }));
            prop_assert!(out.is_empty());
        }
    }

    #[test]
    fn it_does_not_matter_how_the_bytes_are_cut(cuts in prop::collection::vec(1usize..40, 1..60)) {
        let mut encoder = Encoder::new().unwrap();
        let mut bytes = BytesMut::new();
        encoder.syn_stream(1, &[("streamtype", "data")], false, &mut bytes).unwrap();
        bytes.extend_from_slice(&Encoder::data_head(1, 300, true));
        bytes.extend_from_slice(&[7; 300]);
        Encoder::ping(2, &mut bytes);
        let mut decoder = Decoder::default();
        let (mut input, mut data, mut others, mut fins) = (BytesMut::new(), 0, 0, 0);
        let mut cuts = cuts.into_iter().cycle();
        while !bytes.is_empty() {
            let cut = cuts.next().unwrap().min(bytes.len());
            input.extend_from_slice(&bytes.split_to(cut));
            while let Some(frame) = decoder.decode(&mut input).unwrap() {
                match frame {
                    Frame::Data { payload, fin, .. } => {
                        data += payload.len();
                        fins += usize::from(fin);
                    }
                    _ => others += 1,
                }
            }
        }
        prop_assert_eq!((data, others, fins), (300, 2, 1));
    }

    #[test]
    fn garbage_neither_panics_nor_is_held_back(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        let mut decoder = Decoder::default();
        let mut input = BytesMut::from(&bytes[..]);
        while let Ok(Some(_)) = decoder.decode(&mut input) {}
        prop_assert!(input.len() <= bytes.len());
    }

    #[test]
    fn garbage_in_a_header_block_is_bounded(mut bytes in prop::collection::vec(any::<u8>(), 10..2048)) {
        let [.., hi, lo] = bytes.len().to_be_bytes();
        let mut frame = vec![0x80, 3, 0, 1, 0, 0, hi, lo];
        frame.append(&mut bytes);
        for frame in decode_all(&frame).unwrap_or_default() {
            if let Frame::SynStream { headers, .. } = frame {
                let size: usize = headers.iter().map(|(n, v)| n.len() + v.len()).sum();
                prop_assert!(size <= super::header::MAX_BLOCK);
            }
        }
    }
}

#[test]
fn openings_are_found_however_the_bytes_are_cut() {
    let mut encoder = Encoder::new().unwrap();
    let mut out = BytesMut::new();
    let none: [(&str, &str); 0] = [];
    encoder
        .syn_stream(1, &[("streamtype", "stdout")], false, &mut out)
        .unwrap();
    encoder.syn_stream(3, &none, true, &mut out).unwrap();
    // Data that looks like a frame, and data of no length.
    let data = out.clone();
    out.extend_from_slice(&Encoder::data_head(1, data.len(), false));
    out.extend_from_slice(&data);
    out.extend_from_slice(&Encoder::data_head(1, 0, true));
    Encoder::ping(7, &mut out);
    encoder.syn_reply(1, &none, false, &mut out).unwrap();
    Encoder::reset(3, 3, &mut out);
    let expected = [
        Opening::Asked(1),
        Opening::Asked(3),
        Opening::Answered(1),
        Opening::Answered(3),
    ];
    for size in 1..=out.len() {
        let mut openings = Openings::default();
        let mut found = Vec::new();
        for piece in out.chunks(size) {
            openings.take(piece, |opening| found.push(opening));
        }
        assert_eq!(found, expected, "in pieces of {size}");
    }
}
