import type { Words } from "../sentences";

/** Words, with their marks. */
export function Said({ words }: { words: Words }) {
  return (
    <>
      {words.map((each, at) => {
        if (typeof each === "string") return each;
        const of = <Said words={each.of} />;
        if (each.as === "nobreak") return <span key={at} class="nobreak">{of}</span>;
        const Tag = each.as;
        return <Tag key={at}>{of}</Tag>;
      })}
    </>
  );
}
